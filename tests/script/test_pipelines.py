"""What hubs of networks give that records no graph: pipelines, and the transforms that come with weights."""

from __future__ import annotations

import pytest

PAINTED = """
    {imported}

    def main(prompts):
        pipe = {made}
        pipe = pipe.to("cuda")
        for prompt in prompts:
            picture = pipe(prompt)
            picture.save("x.png")
"""


@pytest.mark.parametrize(
    ("imported", "made"),
    [
        ("from diffusers import DiffusionPipeline", "DiffusionPipeline.from_pretrained(name)"),
        ("from diffusers import StableDiffusionPipeline", "StableDiffusionPipeline(vae=vae, unet=unet)"),
        ("from project.pipelines import DepthPipeline", "DepthPipeline.from_single_file(name)"),
    ],
)
def test_a_pipeline_turns_gradients_off_itself(report, imported, made):
    assert report(PAINTED.format(imported=imported, made=made)) == []


@pytest.mark.parametrize(
    ("imported", "made"),
    [
        ("from diffusers import UNet2DModel", "UNet2DModel.from_pretrained(name)"),
        ("from project.models import Painter", "Painter.from_pretrained(name)"),
    ],
)
def test_a_network_does_not(report, imported, made):
    assert report(PAINTED.format(imported=imported, made=made)) == [("OOM201", 7)]


DETECTED = """
    import torch
    {imported}
    from networks import Net

    class Judge:
        def __init__(self):
            self.model = Net().cuda()
            self.model.eval()

    def main(frames):
        model = {made}
        for frame in frames:
            print(model(frame))
"""


@pytest.mark.parametrize(
    ("imported", "made", "found"),
    [
        ("from ultralytics import YOLO", "YOLO('small.pt')", []),
        ("from ultralytics import YOLO, SAM", "SAM('small.pt').to('cuda')", []),
        ("import ultralytics", "ultralytics.RTDETR('small.pt')", []),
        ("from facenet_pytorch import MTCNN", "MTCNN(keep_all=True, device='cuda')", []),
        ("import yolov5", "yolov5.load('small.pt')", []),
        ("from facenet_pytorch import InceptionResnetV1", "InceptionResnetV1()", [("OOM201", 13)]),
        ("from project.models import YOLO", "YOLO()", [("OOM201", 13)]),
    ],
)
def test_a_detector_of_a_library_turns_gradients_off_itself(report, imported, made, found):
    assert report(DETECTED.format(imported=imported, made=made)) == found


WEIGHTS = """
    import torch
    from torchvision.models.detection import fasterrcnn_resnet50_fpn, FasterRCNN_ResNet50_FPN_Weights

    def make():
        weights = FasterRCNN_ResNet50_FPN_Weights.DEFAULT
        model = fasterrcnn_resnet50_fpn(weights=weights)
        model.eval()
        return model, weights.transforms()

    def main(images):
        detector, preprocess = make()
        for image in images:
            x = preprocess(image).cuda()
            with torch.no_grad():
                print(detector([x])[0]["boxes"].tolist())
"""


def test_the_transforms_of_weights_are_no_network(report):
    assert report(WEIGHTS) == []
